"""One module a command or group of commands; each calls what it offers ``command``."""
