"""Model families: a folder and a line in `registry` each."""
