"""A campaign against the commands: malformed inputs, kills at random moments, full disks, and ranks that differ."""
