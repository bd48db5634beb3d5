"""What of a model is sharded how over its tensor ranks: derived from the model on meta, before anything is changed."""
