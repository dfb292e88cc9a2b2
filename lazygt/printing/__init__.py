"""Output for readers: tables in terminals and notebooks, plots in files."""
