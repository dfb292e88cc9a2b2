"""Code that torch alone does not have: users' ops and functions, found here for the workers."""
