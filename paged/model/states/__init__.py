"""State layers of transformers' modules, on states that lie in our memory.

    follow_states(module)       as a model is loaded: its state layers go by the forward pass under way from now on
    one pass of one token       each layer learns its pieces and how it may be called (`trial.py`)
    check_plan, layers_of       what they keep, against the configuration and for a plan of pages (`plan.py`)
    hook.under_way(pass)        a forward pass of tokens of many rows, one after the other: `pass.attend` has the attention layers, and
                                `pass.states`, a `RowStates`, the states of the rows before and behind their tokens (`layer.py`)

So a runner calls the whole module once for all tokens of a pass, with `use_cache=False` and positions, as for any other model; no cache object goes
through the model. A state layer is called once, too, where its recurrence is there in C (`recurrences.py`). Any other is called several times in its place,
for the tokens of a row or a token of each of several rows, with a cache object of ours that knows this one layer (`seams.py`).

What is batch-invariant: a pass has a fixed number of places, at most `trial.LONGEST_CHUNK`, and a row's state goes on from pass to pass by what its
pages hold. A recurrence in C has one order of additions. Other layers are called token by token then, unless trials gave chunks the same bits: lightning
attention loses nothing. The first and last weights of a layer are read once for all
tokens all the same (`projections.py`).
"""
