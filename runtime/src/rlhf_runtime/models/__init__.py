"""The models of a run: where each computes, what each is asked, and the weights that move between them."""
