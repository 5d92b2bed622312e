"""TorchRec: its DistributedModelParallel over gloo with the table's rows dealt to both ranks (`row_wise`), or the table
on the first (`table_wise`), and SGD in the backward pass, as its tutorial trains them."""

import torch
import torchrec
from measuring.beside import answer_with, settings
from measuring.ranking import WIDTH, WORDS, Batches, tower
from ranking_turns import answer_turns
from torch import distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

told = settings()
torch.set_num_threads(1)
dist.init_process_group("gloo")


class Model(torch.nn.Module):
    """The words' rows added up, and two layers."""

    def __init__(self):
        super().__init__()
        config = torchrec.EmbeddingBagConfig(
            name="table", embedding_dim=WIDTH, num_embeddings=told["rows"], feature_names=["words"]
        )
        self.bags = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        self.tower = tower(told["hidden"])

    def forward(self, words):
        return self.tower(self.bags(words).values())


class Way(Batches):
    """Steps of this rank."""

    def __init__(self):
        super().__init__(told["rows"], told["batch"], dist.get_rank())
        torch.manual_seed(0)
        model = Model()
        apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": 0.01})
        how = {"table": {"row_wise": row_wise, "table_wise": lambda: table_wise(rank=0)}[told["how"]]()}
        plan = construct_module_sharding_plan(model.bags, how, local_size=2, world_size=2, device_type="cpu")
        self.model = DistributedModelParallel(
            model, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"),
            ShardingPlan({"bags": plan}), get_default_sharders(),
        )  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.module.tower.parameters(), lr=0.01)
        self.lengths = torch.full((told["batch"],), WORDS)

    def step(self, words, clicked):
        bags = torchrec.KeyedJaggedTensor(["words"], words.reshape(-1), lengths=self.lengths)
        self.optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.binary_cross_entropy_with_logits(self.model(bags), clicked).backward()
        self.optimizer.step()


answer_with(answer_turns(Way(), told["batch"], dist.barrier))
