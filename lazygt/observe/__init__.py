"""Observation of sessions: reports, timelines, pictures and notebook displays."""
