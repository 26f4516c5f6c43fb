"""For plugin authors: a conformance suite for each kind, fabricated data, tiny models and a plain reference trainer.

Import from the modules: ``from rlhf_testing.loss import LossContract``. ``docs/reference/conformance.md`` lists what
each suite proves.
"""
