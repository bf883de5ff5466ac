"""A campaign against the commands: malformed inputs, and kills at random moments."""
