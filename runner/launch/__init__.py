"""The trainer's command line and environment."""
