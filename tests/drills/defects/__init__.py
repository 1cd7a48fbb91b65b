"""Defects for drills to find. Only ``sitecustomize`` is of use, as a program's first import."""
