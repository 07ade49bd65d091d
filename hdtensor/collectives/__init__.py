"""What really communicates: process groups, point-to-point messages, collectives on flat buffers.

Every name is imported from its own module; nothing here decides, and nothing here knows a spec's plan.
"""
