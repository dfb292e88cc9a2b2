"""Users' ops and functions, not part of torch: their code is found here for the workers."""
