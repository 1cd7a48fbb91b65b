"""Stores, one module or package each; the contract suite holds all of them to the same promises."""
