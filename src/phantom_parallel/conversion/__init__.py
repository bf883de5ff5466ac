"""Conversion of trained dense models to phantom models, and their healing. Above families, since it converts them.

``api`` is the story, and the module to read first: a model is divided into stages, whose linear layers are fitted
one after the other, with the ghosts of a budget. The fit itself is `phantom_parallel.nn.fit`. ``run`` does the
same with folders of models.
"""
