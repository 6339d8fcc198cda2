"""What people's programs may ask with a token, and nothing else."""
