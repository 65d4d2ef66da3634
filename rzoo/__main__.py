from rzoo.cli import main

main()
