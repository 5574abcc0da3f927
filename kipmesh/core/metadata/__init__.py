"""The metadata of a cluster: records, the image that they make, and the controller's decisions."""
