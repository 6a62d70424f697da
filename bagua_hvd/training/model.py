"""What one optimizer trains, as its algorithm sees it: gradients, weights, the optimizer's own state, the step."""
from typing import NamedTuple

from bagua_hvd.core.native import TensorView
from bagua_hvd.job import basics
from bagua_hvd.training.buckets import Weights
from bagua_hvd.training.state import State


class AdamMember(NamedTuple):
    """Adam's state and hyperparameters of one weight. m, v: in-place TensorViews in the weight's dtype.

    step: how often it has been updated. decoupled: weight decay as in AdamW, else added to the gradient.
    eps_corrected: eps is added before the bias correction of v, as Keras does, not after it.
    """

    m: TensorView
    v: TensorView
    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    eps_corrected: bool = False


class Adam:
    """An Adam optimizer of a front end, for algorithms that update the weights in its place.

    Attributes:
        warmup_steps: what the optimizer says of itself, or None.
    """

    warmup_steps = None

    def member(self, index):
        """The AdamMember of weight `index`; the state exists from the first step on."""
        raise NotImplementedError

    def stepped(self, index):
        """Weight `index` has been updated: counts it, as the optimizer's own step would."""
        raise NotImplementedError


class Model:
    """One optimizer's weights and gradients on one rank.

    Args:
        name: of its weights; the same on all ranks.
        source: the front end's Gradients. group: the ProcessSet that communicates.
    Attributes:
        step: optimizer steps done before this one, t in the formulas.
        gradients: Buckets, in the order in which they are expected to fill. Sparse gradients are in none.
        weights: one Weights bucket for each dtype and device.
        state: what belongs to no bucket.
        pending: what an algorithm has begun in this step; {} when the next one begins.
        continues: whether the gradients being communicated are those communicated before in this step, and what another
            backward pass has added to them.
        scaled: whether something multiplies the gradients until just before the step (loss scaling, clipping).
    """

    def __init__(self, name, source, group):
        self.name = name
        self.source = source
        self.group = group
        self.step = 0
        self.gradients = []
        self.weights = []
        self.state = State(name)
        self._place = None
        self._scratch, self._scratch_inits = {}, None
        self.pending = {}
        self.continues = False
        self.scaled = False
        self._loss_scale = None     # of what is kept in the gradients' unit; None: none has been seen
        self._unscaled = False      # the gradients of this step were unscaled, so it will be made or skipped now
        self._made_a_step = False   # since this was made or loaded: a loss scale would have been seen
        self._before = None         # what buckets kept before this step, when it may be skipped

    def rename(self, name):
        """Changes the name, and those of its weights."""
        self.name = name
        for place, bucket in enumerate(self.weights):
            bucket.name = f"{name}.{place}"

    @property
    def scratch(self):
        """What an algorithm keeps that no checkpoint needs: a dict.

        Empty after each init(): it may hold operations, which end with the connections.
        """
        if self._scratch_inits != basics.runtime.inits:
            self._scratch, self._scratch_inits = {}, basics.runtime.inits
        return self._scratch

    def add(self, members):
        """More members, by index: their weights join in buckets of their own."""
        by_kind = {}
        for index, member in members.items():
            by_kind.setdefault((member.dtype, member.device), {})[index] = member
        for kind in by_kind.values():
            self.weights.append(Weights(f"{self.name}.{len(self.weights)}", kind, self.source, model=self))

    def adam(self):
        """The optimizer as an Adam.

        Raises:
            ValueError: it is none, or one with an option that cannot be served.
        """
        adam = self.source.adam()
        if isinstance(adam, str):
            raise ValueError(adam)
        return adam

    # Under loss scaling gradients are multiplied until just before the step, and so is what is kept of them: when the
    # scale changes, that is multiplied, too. A step whose gradients are not finite is skipped: what was sent is lost,
    # so what is kept becomes again what it was before. In memory it has the unit of the last communication.

    def communication_begins(self):
        """Gradients are about to be communicated, for the first time in this step or once more."""
        if self._unscaled:
            self.take_back()
        keeps = any(any(bucket.state.kinds()) for bucket in self.gradients)
        scale, before = self.source.loss_scale() if keeps else None, self._loss_scale or 1.0
        if scale is not None:
            if scale != before:
                for bucket in self.gradients:
                    bucket.state.scale(scale / before)
            self._loss_scale = scale
        if self._before is None and (self._loss_scale is not None or not self._made_a_step):
            self._before = [(bucket.state, bucket.state.snapshot()) for bucket in self.gradients]

    @property
    def remembers_gradients(self):
        """Whether anything that is kept has the gradients' unit."""
        return any(bucket.state.has_scaled for bucket in self.gradients)

    def unscales(self):
        """Loss scaling unscales the gradients now: the step is made next, or it is skipped.

        Raises:
            ValueError: what a checkpoint has kept is of gradients with another scale.
        """
        scale = self.source.loss_scale() if self.remembers_gradients else None
        if scale is not None:
            self._check_scale(scale)
            self._loss_scale = scale
        self._unscaled = True

    def _check_scale(self, scale):
        if self._loss_scale not in (None, scale) and not self._made_a_step:
            raise ValueError(
                f"what {self.name} keeps of gradients was saved under a loss scale of {self._loss_scale:g}, and this "
                f"training begins with {scale:g}: load the GradScaler's state_dict, too"
            )

    def step_begins(self):
        """The optimizer is about to step. ValueError: see unscales()."""
        if not self._unscaled and self.remembers_gradients:
            self._check_scale(1.0)

    def stepped(self):
        """The step has been made."""
        self.step += 1
        self._before, self._unscaled, self._made_a_step = None, False, True

    def take_back(self):
        """The step is skipped: what buckets of gradients keep is what it was before, as far as that is known."""
        for state, snapshot in self._before or ():
            state.restore(snapshot)
        self._before, self._unscaled = None, False

    def _states(self):
        return [self.state, *(bucket.state for bucket in self.gradients + self.weights)]

    def kinds_of_state(self):
        """(whether this rank keeps anything that is of this rank only, whether anything at all)."""
        kinds = [state.kinds() for state in self._states()]
        return any(own for own, _ in kinds), any(kept for _, kept in kinds)

    def settle(self):
        """Forgets what was of another rank, or of another number of ranks, before this one was given its place."""
        place = self.group.rank(), self.group.size()
        if self._place not in (None, place):
            self.drop_state(shared=False)
        self._place = place

    def drop_state(self, shared):
        """Forgets what is of this rank only; with shared=True everything."""
        self._before = None
        for state in self._states():
            state.drop(shared)

    def state_dict(self):
        """For a checkpoint of this rank, made of dicts, lists, numbers and bytes. "states" may hold nothing."""
        states = [state.state_dict() for state in self._states()]       # by place: names are of this process only
        return {"step": self.step, "rank": self.group.rank(), "size": self.group.size(), "states": states,
                "loss_scale": self._loss_scale}

    def load_state_dict(self, state):
        """Takes up a state_dict(). What was of another rank, or of another number of ranks, is passed over."""
        self.step = state["step"]
        self._loss_scale = state.get("loss_scale")
        self._before, self._unscaled, self._made_a_step = None, False, False
        self._place = self.group.rank(), self.group.size()
        own = (state["rank"], state["size"]) == self._place
        for target, loaded in zip(self._states(), state["states"], strict=False):
            target.load_state_dict(loaded, own)
