"""The metadata_controller service."""
