"""A campaign against the commands: malformed inputs, kills at random moments, frozen ranks, full disks, and ranks that
differ.

``make campaign`` runs all of it and prints what was tried, clean and bad; ``make test-all`` runs a bounded share. The
same seed makes the same cases, so that a bad one can be run again.
"""
