"""The metadata controller service: a voter of the metadata quorum."""
