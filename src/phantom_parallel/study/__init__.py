"""``phantom compare`` and ``phantom study``. Start with `grid`, which runs both."""
