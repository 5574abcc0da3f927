"""Commands that pods of the Helm chart run before their node starts and stops, and faults of a release for tests.

Needs the extra `kubernetes`.
"""
