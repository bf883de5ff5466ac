"""Counting and planning. Start with `terms`, which says what a rank computes, sends and keeps in a step.

terms                       the formulas; a family's shape sums them over its model
ledger, dryrun              what the running code does, held against the formulas to the unit
hardware, timing, planner   a machine as data, the time and energy of a step on it, and the best layout
calibrate                   this machine measured: its profile, and how far predictions are off
"""
