"""What a front end has to supply for the reduction of its gradients."""


class Gradients:
    """What a front end supplies to a Reducer: its gradients, weights and optimizer, by index."""

    def view(self, index):
        """The in-place TensorView of what travels for gradient `index`, zeros when there is no gradient."""
        raise NotImplementedError

    def fingerprint(self):
        """A number from 0 to 2**31 - 2 that differs, most likely, where gradients are for other variables."""
        return 0

    def sparse_dim(self, index):
        """Of how many leading dimensions gradient `index` holds some entries only; 0: dense, as far as is known."""
        return 0

    def travels_alone(self, index, sparse_dim):
        """Whether a gradient that some rank has sparse goes by communicate() on all of them, and in no bucket."""
        return False

    def communicate(self, index, name):
        """Begins the communication of a gradient that travels by itself; returns something with wait().

        name: what its operations are to be called, unique in this process.
        """
        raise NotImplementedError

    def finish(self):
        """All views of this step hold results: undo compression and copies."""

    def holds_reduced(self):
        """Whether gradients are still those that finish() left, with what has been added to them since."""
        return False

    def discard(self):
        """Forget this step's views; after finish(), or because something failed."""

    def weight(self, index):
        """The in-place TensorView of weight `index`, where it lies now."""
        raise NotImplementedError

    def weight_written(self, index):
        """weight(index) has new values: bring them to where the model has them, if that is elsewhere."""

    def loss_scale(self):
        """What multiplies the loss now, and so the gradients until the step; None: nothing, as far as is known."""
        return None

    def adam(self):
        """The optimizer as an Adam (training/model.py), or a sentence that says why it is none that can be served."""
        return "this front end has no Adam to share"
