"""The command line `kipmesh`. Commands import what they need when they run, so that `--help` is fast."""
