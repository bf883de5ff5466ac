"""Models and trainings on disk."""
