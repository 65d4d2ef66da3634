"""Training: one jitted, shardable step, and the loop that runs, saves and resumes it."""
