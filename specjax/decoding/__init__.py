"""The loop: how networks are run to make text."""
