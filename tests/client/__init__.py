"""Tests of the client SDK: its patience in virtual time, its transports on real sockets."""
