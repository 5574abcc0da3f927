"""The command line tool `kipmesh`. Commands import clients and servers only when they run, so that `--help` is fast."""
