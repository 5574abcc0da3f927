"""Fakes, failing disks and the simulator: what tests of this project, and of others, stand on."""
