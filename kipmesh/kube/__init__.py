"""Commands that pods of the Helm chart run before their node starts and stops. Needs the extra `kubernetes`."""
