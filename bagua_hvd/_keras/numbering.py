"""Numbers of Reducers that are made late: when a step is traced, or run, for the first time."""
import weakref


class Numbered:
    """What makes Reducers as it meets lists of variables, and can tell their numbers to ranks that have met none yet.

    See share_numbers() in reduction/numbers.py. And whose algorithms' state goes into checkpoints, by the same order.
    """

    def __init__(self):
        self._made = []             # weak references to Reducers, in order
        self._promised = []         # numbers of those that are made next
        self._loaded = []           # their state, from a checkpoint

    def make(self, make_reducer):
        """make_reducer(number), which returns a Reducer; number None: the next one."""
        reducer = make_reducer(self._promised.pop(0) if self._promised else None)
        self._made.append(weakref.ref(reducer))
        if self._loaded:
            reducer.load_state_dict(self._loaded.pop(0))
        return reducer

    def reducers(self):
        """Those that live, in the order in which they were made."""
        return [reducer for reducer in (reference() for reference in self._made) if reducer is not None]

    @property
    def number(self):
        """Those of its Reducers, made or to be made."""
        return [reducer.number for reducer in self.reducers()] + self._promised

    def renumber(self, numbers):
        """Changes them, and forgets what is pending."""
        made = self.reducers()
        for reducer, number in zip(made, numbers, strict=False):
            reducer.reset()
            reducer.renumber(number)
        self._promised = numbers[len(made):]

    def state_dicts(self):
        """Those of its Reducers, made or to be made; see Reducer.state_dict()."""
        return [reducer.state_dict() for reducer in self.reducers()] + self._loaded

    def load_state_dicts(self, states):
        """Takes up state_dicts(), and forgets what is pending."""
        made = self.reducers()
        for reducer, state in zip(made, states, strict=False):
            reducer.reset()
            reducer.load_state_dict(state)
        self._loaded = list(states[len(made):])
