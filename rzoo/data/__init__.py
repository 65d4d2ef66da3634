"""Data made here: tasks with exact answers, seeded, of any size."""
