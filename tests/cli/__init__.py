"""The command line and its configuration, against a scripted server."""
