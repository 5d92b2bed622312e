"""A job whose loss asks for a key that no batch has."""

from tests import toy


def loss(model, batch):
    return model(batch["image"]).mean()


job = toy.make_job(loss=loss)
