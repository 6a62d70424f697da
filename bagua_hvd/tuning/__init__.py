"""Which of several ways to communicate is the quickest: what each costs, what is measured, predicted, decided, said."""
