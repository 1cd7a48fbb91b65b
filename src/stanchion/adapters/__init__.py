"""Adapters: the world outside, made to keep the promises of the ports. Only assemble picks them."""
