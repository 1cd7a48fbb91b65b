"""Adapters: implementations of the ports. Only ``assemble`` chooses between them."""
