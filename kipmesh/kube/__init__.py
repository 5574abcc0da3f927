"""kipmesh on Kubernetes: what a pod does before its node starts and before it stops. Needs the extra `kubernetes`."""
