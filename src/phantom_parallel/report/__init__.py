"""Reports: pages, tables, captions and figures made from results. The only package that imports matplotlib."""
