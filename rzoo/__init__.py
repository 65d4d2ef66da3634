"""rzoo: open reasoning models in JAX, exact, readable and fast."""
