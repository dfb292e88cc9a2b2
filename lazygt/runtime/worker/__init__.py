"""Worker: plans, requests and values of one rank."""
