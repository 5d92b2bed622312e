"""torchvision's wheel has its operators compiled for CUDA; a torch for CPUs loads none of them, and the import of
torchvision asks for two by name. Their names are all that the scripts here need."""

import sys


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            import torch

            sys.meta_path.remove(self)
            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _Finder())
