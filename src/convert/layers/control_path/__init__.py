"""Control paths of neural CDEs: diffrax's interpolations as torchcde stores them."""
