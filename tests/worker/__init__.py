"""The worker SDK against a scripted server."""
