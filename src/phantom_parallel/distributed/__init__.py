"""Ranks: how they are launched, which of them share a model, and how they agree on Python objects.

Start with `launch`: it starts local ranks, or joins those that another launcher has started (`launchers`,
`process_group`). `objects` is what ranks send each other besides tensors.
"""
