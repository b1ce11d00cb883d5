"""State layers of transformers' modules, with their states in our memory.

    follow_states(module)       when a model is loaded: its state layers use the states of the forward pass under way from then on
    one pass of one token       each layer learns its pieces, and how it may be called (`trial.py`)
    check_plan, layers_of       what they keep, compared with the configuration, and for a plan of pages (`plan.py`)
    hook.under_way(pass)        a forward pass of tokens of many rows: attention layers use `pass.attend`; state layers use `pass.states`, a
                                `RowStates` with the states of the rows before and after their tokens (`layer.py`)

A runner calls the whole module once for all tokens of a pass, with `use_cache=False` and positions, as for any other model; no cache object goes
through the model. A state layer with a recurrence in C is called once, too (`recurrences.py`). Any other is called several times in its place, for
the tokens of one row or for one token of each of several rows, with a cache object of ours for this one layer (`seams.py`).

In batch-invariant mode a pass has a fixed number of places, at most `trial.LONGEST_CHUNK`, and a row's state goes from pass to pass on its pages. A
recurrence in C adds in one order. Other layers are called token by token, unless trials found that chunks give the same bits, as with lightning
attention. Even then the first and last weights of a layer are read once for all tokens (`projections.py`).
"""
