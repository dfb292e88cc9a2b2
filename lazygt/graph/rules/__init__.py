"""What an op's results will look like, by rule: one small function an op, on metas alone.

A rule has the parameters of its op, tensors as metas, and answers only where it is sure: None
for whatever is unusual, so that a meta kernel decides, and raises torch's own errors. No rule is
asked about tensors with lazy bits or without elements.
"""

from lazygt.graph.rules.layers import LAYERS
from lazygt.graph.rules.tensors import TENSORS, WRITING
from lazygt.graph.rules.views import VIEWS

#: Op -> rule for the tensors it returns anew.
RULES = VIEWS | TENSORS | LAYERS

#: Op -> rule for its first argument, which it writes and returns.
WRITING_RULES = WRITING
