"""Pages, tables and figures of results; the only package that draws. Start with `html`, which writes a report."""
