"""Decisions, pure: no clock, no disk, no network. Events in, actions out."""
